"""Decide a decision log again under other settings, offline."""
