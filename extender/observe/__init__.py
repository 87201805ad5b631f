"""What operators see: metrics and the JSON API."""
