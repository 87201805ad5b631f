"""Settings: description, parsing and checks of every setting, and the settings file."""
