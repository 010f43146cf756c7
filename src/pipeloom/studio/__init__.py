"""The studio: a page on this machine on which schedules and plans are drawn, asked, edited and saved."""
