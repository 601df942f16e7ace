"""Follow a request through the coordinator: hold its cost, route it, send it, pass the answer, charge.

`consume` serves clients that send text, and `leases` serves proxies, whose bodies the coordinator cannot
read; `blind` passes those answers on. Both use `RoutedRequest` for the whole path and `Attempt` for one
try with one provider. `trace_span` reports the path as a span. Open `routed_request` first.
"""
