"""Settings: every setting, how it is described, read and checked; the settings file."""
