"""Accept links and enrolments from strangers under limits of connections and descriptors."""
