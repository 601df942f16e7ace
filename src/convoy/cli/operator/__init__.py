"""The files of an operator and of a member: keys, rosters, invitations, and the folder that holds them."""
