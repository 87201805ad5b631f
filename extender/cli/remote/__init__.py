"""Client of the API: typed answers, transports, errors."""
