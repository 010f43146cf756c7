from .passes import lower as lower
