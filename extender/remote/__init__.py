"""The other side as a client sees it: ways there, what answers hold, what can go wrong."""
