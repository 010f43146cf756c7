from .initialise import Blueprint as Blueprint, blueprint as blueprint
