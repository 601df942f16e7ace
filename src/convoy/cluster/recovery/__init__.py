"""Recover from a lost stage, and use members that come back.

`StageRecovery` finds the members that remain, chooses the next plan, and waits if none fits.
`FaultTracker` finds the member at fault when stages fail again and again, `OutageLog` records one loss,
and `Rebalancer` shares layers out anew when a member comes. Open the module of `StageRecovery` first.
"""
