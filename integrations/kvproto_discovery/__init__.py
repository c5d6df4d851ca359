"""Sources that are looked up by DNS names or in etcd, instead of listed."""

from kvproto_discovery.dns import Dns
from kvproto_discovery.etcd import Etcd
from kvproto_discovery.following import Directory, FoundSources
from kvproto_discovery.places import directory_of, read_found
from kvproto_discovery.registration import Registration
from kvproto_discovery.rows import Row

__all__ = ["Directory", "Dns", "Etcd", "FoundSources", "Registration", "Row", "directory_of", "read_found"]
