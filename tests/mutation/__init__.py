"""How mutants are made and tried."""
