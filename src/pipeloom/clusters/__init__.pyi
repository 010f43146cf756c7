from .devices import (
    BuiltIn as BuiltIn,
    Figure as Figure,
    built_in as built_in,
    built_in_devices as built_in_devices,
)
from .files import load_cluster as load_cluster, save_cluster as save_cluster
from .names import cpu_cluster as cpu_cluster, find_cluster as find_cluster
