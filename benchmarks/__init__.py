"""What is measured here, and the scripts that measure it."""
