"""The model families, and what they share."""
