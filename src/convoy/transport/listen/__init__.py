"""Accept links and enrolments from strangers under limits of connections and descriptors.

`listener` accepts links of members, `enrolment_listener` the newcomers of one invitation, with the TLS of
`enrolment_tls`. `places` bounds the connections that a listener holds, and `descriptors` finds the
process's own limit. Open `listener` first.
"""
