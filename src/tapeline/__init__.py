"""tapeline."""
