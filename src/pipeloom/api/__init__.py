"""Where passes are joined: every public function, and Pipeline. Nothing is imported before it is used."""
