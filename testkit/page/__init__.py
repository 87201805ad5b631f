"""The page on a real server, in a real Chromium."""
