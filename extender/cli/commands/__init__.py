"""One module for each subcommand of `idlegpu`."""
