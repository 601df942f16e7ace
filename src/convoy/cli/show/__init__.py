"""Output of the command line: tables, JSON, progress, help pages, log lines and exit codes."""
