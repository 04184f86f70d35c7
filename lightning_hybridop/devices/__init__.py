"""What is known of devices: a library of sourced profiles, and measurements of the machine that this runs on."""
