"""Enrol a new member: the inviting end and the newcomer's end of one invitation."""
