"""Security audit: bandit reads the code, pip-audit looks up known vulnerabilities of installed packages.

    python -m tools.audit

A finding of bandit is an error, unless a `# nosec` comment with a reason or a line of pyproject.toml excludes it. A
known vulnerability is an error. Packages that cannot be looked up, such as on a machine without network, are counted.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CODE = ("regard", "bench", "tools")


def main() -> int:
    """Run both audits. Returns the exit status: 0 if neither found anything, else 1."""
    with ThreadPoolExecutor() as pool:  # one computes while the other waits for the network
        counts = [each.result() for each in (pool.submit(audit_code), pool.submit(audit_packages))]
    return 1 if any(counts) else 0


def audit_code(folders: tuple[str, ...] = CODE) -> int:
    """Run bandit, print its findings and their number, and return the number."""
    command = [sys.executable, "-m", "bandit", "--quiet", "-c", "pyproject.toml", "-f", "json", "-r", *folders]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        print(f"bandit failed:\n{done.stderr}")
        return 1
    found = json.loads(done.stdout)["results"]
    for each in found:
        print(f"{each['filename']}:{each['line_number']}: {each['test_id']} {each['issue_text']}")
    print(f"bandit: {len(found)} findings in {', '.join(folders)}")
    return len(found)


def audit_packages() -> int:
    """Run pip-audit, print the vulnerabilities and their number, and return the number."""
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--timeout", "3"]
    done = subprocess.run([*command, "--skip-editable"], capture_output=True, text=True)
    try:
        answer = json.loads(done.stdout)
    except json.JSONDecodeError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"pip-audit: not run, the vulnerability database cannot be reached ({last[:120]})")
        return 0
    lines, count = summarize(answer["dependencies"])
    print("\n".join(lines))
    return count


def summarize(packages: list[dict[str, Any]]) -> tuple[list[str], int]:
    """Return the lines to print, and the number of vulnerabilities.

    packages  the list of dependencies in pip-audit's JSON output
    """
    lines = [
        f"{package['name']} {package['version']}: {found['id']}, fixed in {', '.join(found['fix_versions']) or 'none'}"
        for package in packages
        for found in package.get("vulns", [])
    ]
    count = len(lines)
    unknown = [package for package in packages if "vulns" not in package]
    lines.append(f"pip-audit: {count} vulnerabilities in {len(packages) - len(unknown)} packages")
    if unknown:
        lines[-1] += f"; {len(unknown)} packages could not be looked up (no network, or not from PyPI)"
    return lines, count


if __name__ == "__main__":
    sys.exit(main())
