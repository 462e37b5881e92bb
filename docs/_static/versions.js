/* The versions of the site, which lie beside each other, with their pages; the newest comes first.
   docs/_ext/versions.py writes them here. With one version there is nothing to switch. */
const VERSIONS = {};
