"""Show results to people and scripts: tables, JSON, progress, help pages, log lines and exit codes.

Results go to standard output, and errors, hints and progress to standard error. One module maps each class
of error to its exit code; others draw the picture of a cluster, group help pages, format log lines, and
write files whole or not at all. Open `output` first.
"""
