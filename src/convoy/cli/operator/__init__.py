"""The files of an operator and of a member, as commands read and write them.

`Home` is the folder of a member that was set up by an invitation, and `OperatorFiles` the operator's own
folder: its key, the newest roster and used invitations. The other modules make the first machine, enrol a
newcomer, replace a roster by its successor, certify a provider, and ask for passphrases. Open `home` first.
"""
