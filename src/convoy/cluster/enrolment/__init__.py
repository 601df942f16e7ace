"""Enrol a new member: both ends of one invitation.

The inviting end hears strangers, lets the first valid proof use the invitation up, and answers with a
roster. The newcomer's end finds the listener, proves its keys and receives that roster. The computations
are in `crypto.enrolment` and the messages in `wire.messages`. Open the inviting end first.
"""
