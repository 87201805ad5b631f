"""Read-only web page that shows the fleet in a browser."""
