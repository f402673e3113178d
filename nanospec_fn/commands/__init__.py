"""The commands of `python -m nanospec_fn`, a file each: options, checks before any work, and what is printed."""
