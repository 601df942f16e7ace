"""What a Mac's own commands print is read, and what is missing is left out."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.cluster.checkup.apple import check_mac, read_addresses, read_firewall, read_mac, read_ports

OUTPUTS = {
    "sysctl": """machdep.cpu.brand_string: Apple M3 Max
hw.memsize: 68719476736
iogpu.wired_limit_mb: 49152
""",
    "sw_vers": "15.5\n",
    "networksetup": """
Hardware Port: Wi-Fi
Device: en0
Ethernet Address: 00:00:5e:00:53:01

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 00:00:5e:00:53:02

VLAN Configurations
===================
""",
    "ifconfig": """bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 00:00:5e:00:53:02
\tinet6 fe80::1%bridge0 prefixlen 64 scopeid 0xf
\tinet 169.254.10.7 netmask 0xffff0000 broadcast 169.254.255.255
\tstatus: active
""",
    "socketfilterfw": "Firewall is enabled. (State = 1)\n",
}


def recorded(command: Sequence[str]) -> str:
    return OUTPUTS[command[0].rpartition("/")[2]]


def test_the_chip_the_memory_the_bridge_and_the_firewall_are_listed() -> None:
    first, bridge, firewall = check_mac(recorded)
    assert first.what == ("Apple M3 Max with 68.7 GB, macOS 15.5; wired limit of the GPU: 51.5 GB")
    assert bridge.what == "the Thunderbolt bridge bridge0 has 169.254.10.7"
    assert firewall.level == "warn"
    assert firewall.mend is not None


def test_a_mac_that_tells_nothing_ends_no_checkup() -> None:
    mac = read_mac(lambda _command: "")
    assert (mac.chip, mac.memory_bytes, mac.bridge, mac.has_firewall) == ("", 0, "", None)
    assert len(list(check_mac(lambda _command: ""))) == 1


def test_a_bridge_without_a_cable_has_no_address() -> None:
    assert read_ports(OUTPUTS["networksetup"]) == "bridge0"
    assert not read_ports("Hardware Port: Wi-Fi\nDevice: en0\n")
    assert read_addresses("bridge0: flags=8822<BROADCAST,SMART,SIMPLEX,MULTICAST> mtu 1500\n") == ()
    assert read_firewall("Firewall is disabled. (State = 0)\n") is False
