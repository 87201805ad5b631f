"""Creation and testing of mutants."""
