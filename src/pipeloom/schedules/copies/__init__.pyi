from .asked import COPY_OPTIONS as COPY_OPTIONS, FIT as FIT, copies_asked as copies_asked
from .place import Copies as Copies, place_copies as place_copies
from .uplinks import (
    USUAL_K as USUAL_K,
    Uplinks as Uplinks,
    shared_uplinks as shared_uplinks,
    with_copies as with_copies,
)
