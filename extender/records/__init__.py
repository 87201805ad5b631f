"""What was decided and from what, as lines of JSON in a file; and those lines read again."""
