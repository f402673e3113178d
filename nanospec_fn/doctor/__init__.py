"""What is wrong with a draft, and how it is known: `python -m nanospec_fn doctor`.

examine.py rehearses a head along the target's own completions; rounds.py counts what rounds accept; head_file.py reads
a head's files without believing them; repairs.py undoes each known damage; templates.py finds the chat template that
the target knows; diagnosis.py tries them all, verdict.py names what they show, command.py prints it.
"""
