"""The page behind a real server, in a real Chromium."""
