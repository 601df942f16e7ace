"""Choose which member owns which layers, under a policy, or give the reason why none can.

`placement` assigns the layers, as a person's spans say or by itself. `arrange` orders members and cuts,
`sharing` keeps the policy's `rules`, `grouping` joins ranks, and `parallel` chooses between pipeline and
ranks. `route` is the resulting ring. Open `placement` first.
"""
