"""The API as a client sees it: typed answers, ways to reach it, errors."""
