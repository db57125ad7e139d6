"""The rooms of C++: the folders of src and include/trireme, who includes whom, and rings of them. src/a/b and
include/trireme/a/b are one room. Used by count_concepts and its walks."""
import collections
import re

MODULE = re.compile(r"^trireme_module\((\w+)([^)]*)\)", re.MULTILINE)


def room_of(file):
    """The first folder below src or include/trireme: "pager"; of include/trireme/topology.h: "topology"."""
    return re.sub(r"^(?:src|include/trireme)/", "", file).split("/")[0].removesuffix(".h")


def folder_of(name):
    """The product's folder of src/pager/a.cpp and of include/trireme/pager/a.h: "pager"."""
    parts = re.sub(r"^(?:src|include/trireme)/", "", name).split("/")
    return parts[0] if len(parts) > 1 else ""


def sub_room_of(name):
    """As folder_of(), with the folders in it: "pager/weights". include/trireme/zero.h is a room of its own, "zero"."""
    return re.sub(r"^(?:src|include/trireme)/", "", name).rpartition("/")[0] or room_of(name)


def included_files(tree, name):
    """The files of the tree that `name` includes itself."""
    for include in tree.includes[name]:
        beside = f"{name.rpartition('/')[0]}/{include}"
        found = next((path for path in (f"include/{include}", f"src/{include}", beside) if path in tree.includes), None)
        if found:
            yield found


def rings(edges):
    """The sets of two and more nodes each of which leads to all others, sorted. `edges`: {node: nodes}."""
    def reached(node):
        seen, new = set(), [node]
        while new:
            for other in edges.get(new.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    new.append(other)
        return seen

    reach = {node: reached(node) for node in edges}
    return sorted({tuple(sorted(other for other in reach if other in reach[node] and node in reach[other])) for node in reach if node in reach[node]})


def cycles(tree):
    """[(a ring of sub-rooms that include each other, [(file, file of another room of the ring that it includes)])]"""
    edges, includes = collections.defaultdict(set), []
    for name in sorted(tree.includes):
        for used in included_files(tree, name):
            if sub_room_of(used) != sub_room_of(name):
                edges[sub_room_of(name)].add(sub_room_of(used))
                includes.append((name, used))
    return [(ring, [pair for pair in includes if all(sub_room_of(file) in ring for file in pair)]) for ring in rings(edges)]


def unused_edges(tree, root):
    """Pairs of modules of src/CMakeLists.txt, of which the first is linked to the second and includes nothing of it."""
    path, used = root / "src/CMakeLists.txt", collections.defaultdict(set)
    for name in tree.includes:
        used[room_of(name)] |= {room_of(other) for other in included_files(tree, name)}
    for module, words in MODULE.findall(path.read_text() if path.exists() else ""):
        depends = re.search(r"\bDEPENDS\s+([a-z0-9_\s]+)", words)
        for other in depends.group(1).split() if depends else ():
            if other not in used[module]:
                yield module, other
