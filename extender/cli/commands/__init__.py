"""The subcommands: a module for each, with its `command`; `extender.cli.registry` lists them."""
