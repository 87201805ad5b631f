"""The page: what people see of the fleet in a browser. Nothing here changes anything."""
