"""Small models we train ourselves, their data, recipes, shipped weights and widened forms."""
