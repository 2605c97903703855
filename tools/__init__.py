"""What writes the generated pages and tables: ``make pages``."""
