"""What is computed in C, where it can be compiled: products, attention, rows, laws and draws."""
