"""The page that shows the fleet in a browser. It changes nothing."""
