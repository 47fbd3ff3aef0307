"""An example: invoice numbers without gaps, by a Singleton."""
