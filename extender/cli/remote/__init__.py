"""Client of the API: transports, errors."""
