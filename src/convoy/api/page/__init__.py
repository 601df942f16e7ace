"""Serve the page at ``/``, and the sessions of persons who operate the head.

`tokens` holds the tokens that ``convoy open`` leaves on disk, `sessions` the sessions that they begin, and
`rights` decides which paths a session may use. `invitations` passes the questions of ``convoy invite`` to
persons. `files` sends the static files, and `status_stream` the state of the cluster to every open page.
`endpoints` has the paths below ``/page``. The folder ``static`` has the page itself: plain modules without a
build step, and libraries in ``static/vendor``. Open `rights` first.
"""
