"""The OpenAI interface as bytes: requests, errors, responses and chunks of streams."""
