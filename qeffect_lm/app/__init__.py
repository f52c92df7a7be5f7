"""The composition root: config → objects → loop → teardown. Besides ``integrations`` the only part that imports the siblings.

``assemble`` wires one rank's objects, ``run`` trains, ``dry_run`` shows what would run, ``main`` is the command line.
Importing this package imports no torch; its modules do.
"""
