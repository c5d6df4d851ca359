"""The command line tool `kvproto`."""
