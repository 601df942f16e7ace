"""Serve the page at ``/`` of a head and of a coordinator, and the sessions of persons.

`tokens` holds the tokens that ``convoy open`` leaves on disk, `sessions` the sessions that they begin, and
`rights` decides which paths a session may use. `invitations` passes the questions of ``convoy invite`` to
persons. `files` sends the static files, and `status_stream` the server's state to every open page.
`session_endpoints` has the paths of both servers, and `endpoints` those of a head alone. The folder
``static`` has the page itself: plain modules without a build step, and libraries in ``static/vendor``. Open
`rights` first.
"""
