"""Three network namespaces and the traffic in them: what tests, the lab, the demo and the benches share.

`namespaces` builds client, gateway and server; `streams` and `transfers` (TCP, by iperf3) start traffic in them
and return what was counted (`reports`); `chart` draws it. The other modules are the parts of
`python -m scripts.testbed.traffic`, which runs inside a namespace.
"""
