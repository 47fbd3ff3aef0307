"""Integrations with frameworks. Each imports its framework alone, and nothing imports them."""
